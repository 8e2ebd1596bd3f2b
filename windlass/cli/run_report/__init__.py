"""Page of a run: `run_data` reads the files of a run, `svg_charts` draws curves, `report_page` makes the page."""
