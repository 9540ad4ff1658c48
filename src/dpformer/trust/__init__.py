"""Nobody has to believe us: `verify` checks the machinery against independent arithmetic, `audit` attacks it."""
