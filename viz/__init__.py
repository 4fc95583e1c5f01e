"""What people see of a run, computed from its events alone. Pure: no torch, no gradio, no clock, no files.

    events ──► stage.message   compact JSON for the page's stage, which only draws
           ──► why, words      sentences, in every language of the one table
           ──► charts          plotly figures
           ──► graph           networkx trees, GraphML
           ──► verdict         was the answer the one that plain decoding gives?
           ──► whatif          which nodes another budget would have kept
           ──► export          one HTML file that replays a run offline, CSV of the metrics

The same events give the same bytes. `playground` alone has a clock and threads: it stands behind the page, brings
visitors to the models one at a time and hands the engine's events on.
"""
