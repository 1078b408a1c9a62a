"""The attention explorer: a local web page that shows which weights softmax, linear and InLine attention give a query.

`rows.py` computes one query, `capture.py` keeps what the layers of a model computed from one image, `explorer.py`
answers the questions of the page, `server.py` and `site.py` deliver them from a process or from files. `web/` has the
page.
"""
