"""How weights travel: codec, manifests, publisher, subscriber, vLLM weight-transfer engine."""
