//! A table of functions, from the symbols of a file.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Assumed size of a function that has no size and no symbol after it, in bytes.
const LAST_SIZE: u64 = 4096;

/// A symbol of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol<N> {
    /// The address of the first byte; zero if the file hides it.
    pub address: u64,
    /// The size in bytes; `None` if unknown.
    pub size: Option<u64>,
    /// The function's name; `None` for data. A function without a size ends at the next symbol, even if that is data.
    pub name: Option<N>,
}

/// A function's name and address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function<N> {
    /// The address of the first byte.
    pub start: u64,
    /// The address after the last byte.
    pub end: u64,
    /// The name.
    pub name: N,
}

/// Functions that do not overlap, ordered by address. Can be collected from symbols in any order.
///
/// The end of a function follows from its size; a function without a size ends at the next symbol. No function
/// extends beyond the start of the next one. If several functions have the same address, the largest is kept; if
/// their sizes are equal, the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Functions<N> {
    list: Vec<Function<N>>,
    hidden: bool,
}

impl<N> Functions<N> {
    /// Returns whether the table is empty. Functions with address zero are not in the table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns whether the symbols included functions, but only with address zero. The kernel shows zeros
    /// instead of addresses to users without permission (`kptr_restrict`).
    #[must_use]
    pub fn are_hidden(&self) -> bool {
        self.hidden
    }

    /// Returns the name of the function that contains `address`, and the offset in that function.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<(&N, u64)> {
        let function = self.list.get(self.index(address)?)?;
        Some((&function.name, address - function.start))
    }

    /// Returns the functions that contain any of `addresses`, each once, ordered by start address.
    pub fn covering(&self, addresses: impl IntoIterator<Item = u64>) -> Vec<&Function<N>> {
        let indices = addresses.into_iter().filter_map(|at| self.index(at));
        let indices: BTreeSet<usize> = indices.collect();
        let functions = indices.into_iter().filter_map(|index| self.list.get(index));
        functions.collect()
    }

    /// Replaces the names of all functions.
    #[must_use]
    pub fn rename<M>(self, mut name: impl FnMut(N) -> M) -> Functions<M> {
        let list = self.list.into_iter().map(|function| Function {
            start: function.start,
            end: function.end,
            name: name(function.name),
        });
        Functions { list: list.collect(), hidden: self.hidden }
    }

    fn index(&self, address: u64) -> Option<usize> {
        let after = self.list.partition_point(|function| function.start <= address);
        let index = after.checked_sub(1)?;
        (address < self.list.get(index)?.end).then_some(index)
    }
}

impl<N> FromIterator<Symbol<N>> for Functions<N> {
    fn from_iter<I: IntoIterator<Item = Symbol<N>>>(symbols: I) -> Self {
        let mut hidden = false;
        let mut has_address = |symbol: &Symbol<N>| {
            let has = symbol.address != 0;
            hidden |= !has && symbol.name.is_some();
            has
        };
        let mut symbols: Vec<Symbol<N>> = symbols.into_iter().filter(&mut has_address).collect();
        // The sort is stable. Of symbols with equal sort keys, `dedup_by_key` keeps the one that is first in the file.
        symbols.sort_by_key(|symbol| (symbol.address, symbol.name.is_none(), Reverse(symbol.size)));
        symbols.dedup_by_key(|symbol| symbol.address);
        let (mut next, mut next_function) = (None, u64::MAX);
        for symbol in symbols.iter_mut().rev() {
            let start = symbol.address;
            if symbol.name.is_some() {
                let most = next_function - start;
                let size = symbol.size.or_else(|| Some(next? - start));
                symbol.size = Some(size.unwrap_or(LAST_SIZE).min(most));
                next_function = start;
            }
            next = Some(start);
        }
        let function = |symbol: Symbol<N>| {
            let name = symbol.name?;
            let start = symbol.address;
            let end = start.saturating_add(symbol.size?);
            Some(Function { start, end, name })
        };
        // `collect` reuses the allocation of `symbols`. A new one would be large, because a kernel has a hundred
        // thousand symbols.
        let list: Vec<Function<N>> = symbols.into_iter().filter_map(function).collect();
        Self { hidden: hidden && list.is_empty(), list }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    fn symbol(address: u64, size: Option<u64>, name: Option<&str>) -> Symbol<&str> {
        Symbol { address, size, name }
    }

    fn function(start: u64, end: u64, name: &str) -> Function<&str> {
        Function { start, end, name }
    }

    #[test]
    fn function_without_size_ends_at_next_symbol() {
        let functions: Functions<&str> = [
            symbol(0x300, None, Some("last")),
            symbol(0x100, None, Some("first")),
            symbol(0x180, None, None),
            symbol(0x200, None, Some("second")),
        ]
        .into_iter()
        .collect();
        assert_eq!(
            functions.list,
            [function(0x100, 0x180, "first"), function(0x200, 0x300, "second"), function(0x300, 0x1300, "last"),]
        );
    }

    #[test]
    fn function_with_size_contains_data_and_ends_at_next_function() {
        let functions: Functions<&str> = [
            symbol(0x100, Some(0x80), Some("table_inside")),
            symbol(0x140, Some(8), None),
            symbol(0x200, Some(0x1000), Some("too_long")),
            symbol(0x300, Some(u64::MAX), Some("endless")),
        ]
        .into_iter()
        .collect();
        assert_eq!(
            functions.list,
            [
                function(0x100, 0x180, "table_inside"),
                function(0x200, 0x300, "too_long"),
                function(0x300, u64::MAX, "endless"),
            ]
        );
    }

    #[test]
    fn largest_function_counts_at_one_address() {
        let functions: Functions<&str> = [
            symbol(0x100, None, None),
            symbol(0x100, None, Some("label")),
            symbol(0x100, Some(0x10), Some("function")),
            symbol(0x100, Some(0x10), Some("alias")),
            symbol(0x100, Some(8), Some("entry")),
        ]
        .into_iter()
        .collect();
        assert_eq!(functions.list, [function(0x100, 0x110, "function")]);
    }

    #[test]
    fn address_has_name_and_offset_of_its_function() {
        let functions: Functions<&str> =
            [symbol(0x100, Some(0x10), Some("first")), symbol(0x200, Some(0x10), Some("second"))].into_iter().collect();
        assert_eq!(functions.at(0x100), Some((&"first", 0)));
        assert_eq!(functions.at(0x20f), Some((&"second", 0xf)));
        for outside in [0, 0xff, 0x110, 0x1ff, 0x210, u64::MAX] {
            assert_eq!(functions.at(outside), None, "{outside:#x}");
        }
        let covering = functions.covering([0x20f, 0x200, 0x10f, 0x300]);
        assert_eq!(covering, [&function(0x100, 0x110, "first"), &function(0x200, 0x210, "second")]);
        let renamed = functions.rename(str::len);
        assert_eq!(renamed.at(0x204), Some((&6, 4)));
    }

    #[test]
    fn functions_are_hidden_only_when_all_addresses_are_zero() {
        let collect = |symbols: &[Symbol<&'static str>]| -> (bool, bool) {
            let functions: Functions<&str> = symbols.iter().copied().collect();
            (functions.is_empty(), functions.are_hidden())
        };
        let hidden = symbol(0, None, Some("hidden"));
        let shown = symbol(1, None, Some("shown"));
        assert_eq!(collect(&[]), (true, false));
        assert_eq!(collect(&[symbol(0, None, None)]), (true, false));
        assert_eq!(collect(&[hidden]), (true, true));
        assert_eq!(collect(&[hidden, symbol(1, None, None)]), (true, true));
        assert_eq!(collect(&[hidden, shown]), (false, false));
    }

    proptest! {
        #[test]
        fn functions_of_any_symbols_are_ordered_and_apart(
            symbols in vec(
                (prop_oneof![0..64_u64, any::<u64>()],
                 option::of(prop_oneof![0..64_u64, any::<u64>()]),
                 any::<bool>()),
                0..64,
            ),
            addresses in vec(prop_oneof![0..64_u64, any::<u64>()], 0..64),
        ) {
            let starts: BTreeSet<u64> = symbols
                .iter()
                .filter(|&&(address, _, is_code)| address != 0 && is_code)
                .map(|&(address, ..)| address)
                .collect();
            let functions: Functions<usize> = symbols
                .into_iter()
                .enumerate()
                .map(|(index, (address, size, is_code))| Symbol {
                    address,
                    size,
                    name: is_code.then_some(index),
                })
                .collect();
            let found: Vec<u64> = functions.list.iter().map(|function| function.start).collect();
            prop_assert_eq!(found, starts.into_iter().collect::<Vec<u64>>());
            for pair in functions.list.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start);
            }
            for function in &functions.list {
                prop_assert!(function.start <= function.end);
            }
            for address in addresses {
                let inside = |function: &&Function<usize>| {
                    (function.start..function.end).contains(&address)
                };
                let expected = functions.list.iter().find(inside);
                prop_assert_eq!(
                    functions.at(address),
                    expected.map(|function| (&function.name, address - function.start))
                );
                prop_assert_eq!(functions.covering([address, address]).first().copied(), expected);
            }
        }
    }
}
