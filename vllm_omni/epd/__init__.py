"""Encode, prefill and decode of one model: tasks, budgets, costs, deadlines, images kept for the next request."""
