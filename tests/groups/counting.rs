//! Counting in a stock guest, through `/dev/vpmu`.

tests::group!("counting");
