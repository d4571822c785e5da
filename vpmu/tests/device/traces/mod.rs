//! Traces as a guest program reads them: exits and samples in order, starts and ends.

pub(crate) mod area;
mod ends;
mod exits;
mod hardware;
mod samples;
mod steering;
