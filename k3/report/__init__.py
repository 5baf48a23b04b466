"""What people look at: pages, plots and tables, from plain dicts."""
