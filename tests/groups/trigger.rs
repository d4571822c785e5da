//! Tests starters and stoppers from user space. An event must count exactly the exits in its region, and placing a mark
//! must cost exactly one exit.

tests::group!("trigger");
