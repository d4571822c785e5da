//! Traces as a guest program reads them: which exits and samples they hold, in which order, from when
//! on and until when.

pub(crate) mod area;
mod ends;
mod exits;
mod hardware;
mod samples;
mod steering;
