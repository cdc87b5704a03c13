"""How weights travel: delta codec, manifests, publisher, subscriber, vLLM weight-transfer engine."""
