"""Page of a run: `run_data` reads what a run left on disk, `svg_charts` draws curves, `report_page` makes the page."""
