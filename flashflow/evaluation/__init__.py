"""Evaluation of one model outside a run: samples of held-out problems, their rewards, and what follows from them."""
