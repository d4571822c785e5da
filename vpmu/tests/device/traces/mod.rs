//! Traces as a guest program reads them: the order of exits and samples, and how traces start and end.

mod ends;
mod exits;
mod hardware;
mod samples;
mod steering;
