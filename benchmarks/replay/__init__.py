"""Replay of recorded coding-agent sessions: corpus -> plan -> aiperf -> what was really sent -> row and verdict.

``corpus`` reads sessions of any format, ``text`` gives them words, ``plan`` decides what each lane sends and when,
``client`` runs aiperf over it, ``fidelity`` compares what was sent with the plan, ``cache`` counts prefix hits,
``row`` writes InferenceX's nested agentic JSON, ``judge`` says whether the number counts.
"""
