"""Heads made here: a corpus that the target writes itself (`corpus`), what a head learns from it (`losses`),
the run (`trainer`) and the measuring of the result (`evaluate`)."""
