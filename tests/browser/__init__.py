"""The dashboard in a real browser, over real jobs (`make test-browser`)."""
