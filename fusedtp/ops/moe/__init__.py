"""The operations of a mixture of experts."""
