"""Membership of the cluster: its certificate authority, join tokens, members and enrolment."""
