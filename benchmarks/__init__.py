"""What is measured: facts about the machine, and the bars of the product."""
