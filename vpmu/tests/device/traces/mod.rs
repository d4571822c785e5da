//! Traces as read by a guest program: their exits and samples, in order, with start and end.

pub(crate) mod area;
mod ends;
mod exits;
mod hardware;
mod samples;
mod steering;
