//! Tests of the entries in the list of persistent events, and of their names.

use super::*;

fn raw(id: u64, name: &str, flags: u32) -> PersistentEntry {
    let mut bytes = [0; PERSISTENT_NAME];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    let mut attr = [0; vpmu_abi::uapi::ATTR_SIZE];
    attr[0] = 9;
    attr[8] = 7;
    PersistentEntry { id, name: bytes, cpu: 1, pages: 65, engine: 1, flags, attr }
}

#[test]
fn persistent_entry_describes_its_event() {
    let event = Persistent::from_raw(&raw(5, "boot-0", PERSISTENT_OPERATOR | PERSISTENT_WINDOW));
    assert_eq!((event.id, event.name.as_str(), event.cpu), (5, "boot-0", 1));
    assert_eq!(event.data_pages, Some(64));
    assert!(event.is_operators && event.outlives_reset && !event.overwrites);
    assert_eq!((event.attr.pmu_type, event.attr.config), (9, 7));
    assert_eq!((event.attr.cpu, event.attr.pid), (1, -1));
    assert_eq!(event.attr.engine, Engine::Exit);
    let without = PersistentEntry { pages: 0, flags: PERSISTENT_OVERWRITE, ..raw(5, "boot-0", 0) };
    let event = Persistent::from_raw(&without);
    assert_eq!((event.data_pages, event.overwrites), (None, true));
    assert!(!event.is_operators && !event.outlives_reset);
}

#[test]
fn events_are_found_by_name_and_id_and_else_those_alike_are_named() {
    let events = || {
        let names = [(3, "boot-0"), (4, "boot-1"), (77, "disk")];
        let events = names.iter().map(|&(id, name)| raw(id, name, 0));
        events.map(|raw| Persistent::from_raw(&raw)).collect()
    };
    assert_eq!(find(events(), "disk").unwrap().id, 77);
    assert_eq!(find(events(), "4").unwrap().name, "boot-1");
    let said = |name: &str| find(events(), name).unwrap_err().to_string();
    assert_eq!(
        said("boot"),
        "no persistent event \"boot\": did you mean boot-0 or boot-1?; `vperf persist ls` shows all"
    );
    assert_eq!(said("5"), "no persistent event \"5\"; `vperf persist ls` shows all");
}

#[test]
fn names_have_their_room_and_letters() {
    let longest = "a".repeat(39);
    let bytes = name_bytes(&longest).unwrap();
    assert_eq!((&bytes[..39], bytes[39]), (longest.as_bytes(), 0));
    assert_eq!(name_bytes(""), Some([0; PERSISTENT_NAME]));
    assert_eq!(name_bytes(&(longest + "a")), None);
    assert_eq!(name_bytes("a\0b"), None);
    for good in ["", "a", "a1-_", "boot-0"] {
        assert!(is_name(good), "{good}");
    }
    for wrong in ["1a", "-", "_a", "A", "a b", "a/b", "é"] {
        assert!(!is_name(wrong), "{wrong}");
    }
}
