"""Token generation: the engine contract and the bundled torch engine."""
