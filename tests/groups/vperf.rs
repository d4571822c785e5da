//! The vperf command and its library in a stock guest, as users use them.

tests::group!("vperf");

/// Events that the host started.
mod operator {
    tests::group!("vperf-operator", started(&["--persistent", "marks,cpu=0,size=64K,name=boot"]));
}
