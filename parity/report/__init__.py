"""The report: everything that a run judged, as one static HTML file that needs no network and no JavaScript.

`entries` turns judgements into plain data that survives a trip between processes; `page` turns those into the file.
"""
