"""Sampling: the search protocol, the agent loop, the vLLM engine, the unit queue and the reward."""
