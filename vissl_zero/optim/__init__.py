"""Base optimizers, parameter groups, schedules, and what an update rule depends on."""
