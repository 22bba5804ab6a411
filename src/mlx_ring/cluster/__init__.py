"""The cluster as the head sees it: membership, control, deployment, link survey, quarantine and recovery."""
