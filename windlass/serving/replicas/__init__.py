"""Replicas of an engine in processes of their own, behind a router."""
