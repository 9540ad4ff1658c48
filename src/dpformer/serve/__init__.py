"""A released model behind HTTP: an API, and a page to try it. Needs the extra `serve`."""
