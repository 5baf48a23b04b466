"""How text becomes token ids and back. Imports nothing of ours but `UserError`."""
