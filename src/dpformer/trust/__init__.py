"""`verify` recomputes what a run promises by independent arithmetic; `audit` attacks its recipe."""
