"""Which tensor of one side belongs to which of the other, also where ZeRO or a topology cut it otherwise."""
