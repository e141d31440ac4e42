"""`hemiola reproduce`: every published claim that is tested here, run, checked, drawn and put into words.

`claims.toml` is the one table of claims; `experiments/` has the experiment files it names. A claim's numbers are
measured on the results (`numbers`) or by a function (`functions`), and its checks compare them with bounds that it can
miss.
"""
