"""Joint placement of the first jobs of the order by a mixed-integer linear program."""
