//! The elements that all parts of a saved state share. Each module declares the saved form of its own types, beside these
//! types, and the module `save` puts the parts together. A change to any field of a saved type requires a new
//! [`FORMAT`](crate::save::FORMAT).

/// The fault in an invalid part of a [`SavedState`](crate::SavedState).
pub(crate) type Fault = &'static str;

/// Declares types for plain data. Every field is serialized, and unknown fields are rejected.
macro_rules! saved {
    ($($(#[$meta:meta])* $vis:vis $kind:ident $name:ident { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[cfg_attr(
            feature = "serde",
            derive(serde::Serialize, serde::Deserialize),
            serde(deny_unknown_fields)
        )]
        $vis $kind $name { $($body)* }
    )*};
}
pub(crate) use saved;
