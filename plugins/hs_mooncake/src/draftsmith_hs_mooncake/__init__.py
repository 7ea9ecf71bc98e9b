"""Hidden states through a Mooncake store; importing this costs nothing (see :mod:`draftsmith_hs_mooncake.plugin`)."""
