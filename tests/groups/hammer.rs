//! Several processes make random calls to the driver at the same time, in a guest whose kernel checks each allocation.

// `started &[]` replaces the usual `--max-sampling-percent 100`, so the default limit applies. Without that limit,
// clock events with the shortest sampling period would leave an emulated processor no time for anything else.
tests::group!("hammer", appending("slub_debug=FZPU"), started(&[]));
