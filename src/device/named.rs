//! Enumerations whose variants, their names and the list of all are written once.

/// An enumeration with [`ALL`](crate::device::Phase::ALL) its variants in order, the name of each as a user types it, and
/// the way back from that name. A variant without a name does not compile, and none can be left out of the list.
macro_rules! named {
    (
        $(#[$of_all:meta])*
        pub enum $Name:ident { $($(#[$of_one:meta])* $Variant:ident = $name:literal,)+ }
    ) => {
        $(#[$of_all])*
        pub enum $Name { $($(#[$of_one])* $Variant,)+ }

        impl $Name {
            pub const ALL: &'static [$Name] = &[$($Name::$Variant),+];

            pub fn name(self) -> &'static str {
                match self { $($Name::$Variant => $name,)+ }
            }

            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.name() == name)
            }

            /// All names, for a message.
            pub fn names() -> String {
                Self::ALL.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ")
            }
        }
    };
}

pub(super) use named;
