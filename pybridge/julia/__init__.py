"""Everything that touches the Julia runtime. The only folder that imports juliacall."""
