"""How weights move: per-head Muon, AdamW for the rest, QK-clip, the schedule, expert balancing."""
