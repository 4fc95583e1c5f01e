.PHONY: run test check format

run:     ## open the page
	python app.py

test:    ## everything, as the README says
	pytest

check:   ## what a change must pass besides the tests
	ruff check . && ruff format --check . && mypy eagle_core viz

format:  ## put imports and lines in order
	ruff check --fix . && ruff format .
