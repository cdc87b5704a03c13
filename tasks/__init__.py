"""The work of a training run, one sub-package a topic; flows compose it."""
