"""What pages of the dashboard and cells of a notebook share: curves, parts of HTML and their style."""
