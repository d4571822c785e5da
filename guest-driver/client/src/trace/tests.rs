use proptest::prelude::*;

use super::composed;
use super::*;

/// Kinds and sequence numbers of a stream's packets.
fn shapes(position: u64, bytes: &[u8]) -> Vec<Result<(&'static str, u64), u64>> {
    Packets::new(position, bytes)
        .map(|packet| match packet {
            Ok(Packet::Exit(exit)) => Ok(("exit", exit.sequence())),
            Ok(Packet::Sample(sample)) => Ok(("sample", sample.sequence())),
            Ok(Packet::Sync(sync)) => Ok(("sync", sync.sequence())),
            Ok(Packet::Padding) => Ok(("padding", 0)),
            Err(error) => Err(error.position),
        })
        .collect()
}

fn exit(sequence: u64) -> Vec<u8> {
    composed::Exit { sequence, ..composed::Exit::default() }.bytes()
}

fn sample(sequence: u64) -> Vec<u8> {
    let mut bytes = vec![2, USER_IP_REGS, 0, 0];
    bytes.extend(3u32.to_le_bytes());
    for word in [100u64, 0x4000, 1000, 7 | 8 << 32, sequence, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    for register in 0..24u64 {
        bytes.extend((1000 + register).to_le_bytes());
    }
    assert_eq!(bytes.len(), 256);
    bytes
}

const USER_IP_REGS: u8 = 1 | 2 | 16;

#[test]
fn layouts_are_the_drivers() {
    assert_eq!((size_of::<Exit>(), size_of::<Sync>(), size_of::<TraceSample>()), (64, 64, 256));
    assert_eq!(align_of::<TraceSample>(), 1, "bytes may begin anywhere");
    assert_eq!(ALIGN, 64);
}

#[test]
fn exit_packet_has_every_field() {
    let bytes = composed::Exit {
        flags: 1 | 2 | 4,
        reason: 2,
        vcpu: 3,
        time: 100,
        ip: 0x4000,
        outside: 250,
        qualification: 0x3f8,
        detail: 1 | 1 << 8 | 5 << 32,
        pid: 7,
        sequence: 9,
    }
    .bytes();
    let Some(Ok(Packet::Exit(exit))) = Packets::new(64, &bytes).next() else {
        panic!("{:?}", shapes(64, &bytes));
    };
    assert_eq!(exit.reason(), Reason::Io);
    assert_eq!((exit.vcpu(), exit.time(), exit.outside()), (3, 100, 250));
    assert_eq!((exit.ip(), exit.user()), (Some(0x4000), true));
    assert!(exit.is_cut());
    assert_eq!((exit.pid(), exit.tid(), exit.sequence()), (7, 8, 9));
    let access = Access { address: 0x3f8, memory: false, write: true, size: 1, count: 5 };
    assert_eq!(exit.access(), Some(access));
}

#[test]
fn reasons_are_distinguished_and_missing_addresses_omitted() {
    let of = |reason, flags| {
        let bytes =
            composed::Exit { flags, reason, ip: 5, qualification: 0xd000_0000, detail: 4, ..composed::Exit::default() }
                .bytes();
        match Packets::new(64, &bytes).next() {
            Some(Ok(Packet::Exit(exit))) => *exit,
            other => panic!("{other:?}"),
        }
    };
    let numbers = [
        (2, Reason::Io),
        (3, Reason::Mmio),
        (4, Reason::Hlt),
        (5, Reason::Signal),
        (6, Reason::Other),
        (0, Reason::Unknown(0)),
        (77, Reason::Unknown(77)),
    ];
    for (number, reason) in numbers {
        assert_eq!(of(number, 0).reason(), reason);
        assert_eq!(of(number, 8).reason(), Reason::Hardware(number));
        assert_eq!(of(number, 8).access(), None, "the words are the hardware's");
        assert_eq!(of(number, 0).ip(), None);
    }
    let access = of(3, 0).access().unwrap();
    assert!(access.memory && !access.write);
    assert_eq!((access.address, access.size, access.count), (0xd000_0000, 4, 1));
}

#[test]
fn samples_have_their_registers_by_the_kernels_numbers() {
    let bytes = sample(9);
    let Some(Ok(Packet::Sample(sample))) = Packets::new(64, &bytes).next() else {
        panic!("{:?}", shapes(64, &bytes));
    };
    assert_eq!((sample.vcpu(), sample.time(), sample.period()), (3, 100, 1000));
    assert_eq!((sample.ip(), sample.user()), (Some(0x4000), true));
    assert_eq!((sample.pid(), sample.tid(), sample.sequence()), (7, 8, 9));
    assert!(!sample.is_collision());
    assert_eq!(sample.register(0), Some(1000));
    assert_eq!(sample.register(23), Some(1023));
    assert_eq!(sample.register(24), None);
    let mut none = bytes.clone();
    none[1] = 32;
    let Some(Ok(Packet::Sample(sample))) = Packets::new(64, &none).next() else { panic!() };
    assert_eq!((sample.register(0), sample.ip()), (None, None));
    assert!(sample.is_collision());
}

#[test]
fn syncs_report_what_is_missing() {
    for (flags, expected) in [
        (1, [true, false, false, false]),
        (2, [false, true, false, false]),
        (4, [false, false, true, false]),
        (8, [false, false, false, true]),
    ] {
        let bytes = sync(flags, 11, 128);
        let Some(Ok(Packet::Sync(sync))) = Packets::new(0, &bytes).next() else { panic!() };
        let is = [sync.is_start(), sync.is_loss(), sync.is_resume(), sync.is_page()];
        assert_eq!(is, expected);
        assert_eq!((sync.sequence(), sync.lost()), (11, 128));
        assert_eq!((sync.event(), sync.time(), sync.tsc()), (42, 5, 6));
        assert_eq!((sync.config(), sync.vcpu(), sync.format()), (7, 1, 1));
    }
}

#[test]
fn packets_follow_one_another() {
    let stream = [sync(1, 0, 0), exit(0), sample(1), vec![0; 128], exit(2)].concat();
    assert_eq!(
        shapes(0, &stream),
        [Ok(("sync", 0)), Ok(("exit", 0)), Ok(("sample", 1)), Ok(("padding", 0)), Ok(("padding", 0)), Ok(("exit", 2))]
    );
    assert!(shapes(0, &[]).is_empty());
}

#[test]
fn after_garbage_the_next_page_is_read() {
    // The data begins in the second page, with garbage that contains a valid sync, and ends in the
    // third page.
    let mut stream = vec![9; 64];
    stream.extend(sync(1, 5, 0));
    stream.resize(4096 - 64, 0xee);
    stream.extend(sync(8, 6, 0));
    stream.extend(exit(6));
    assert_eq!(shapes(4096 + 64, &stream), [Err(4096 + 64), Ok(("sync", 6)), Ok(("exit", 6))]);
    // If the data ends before the next page, the garbage yields one error and no packet.
    assert_eq!(shapes(64, &stream[..256]), [Err(64)]);
}

#[test]
fn impossible_packet_is_an_error() {
    let mut no_magic = sync(1, 0, 0);
    no_magic[8] ^= 1;
    assert_eq!(shapes(64, &no_magic), [Err(64)]);
    let mut no_padding = vec![0; 64];
    no_padding[63] = 1;
    assert_eq!(shapes(64, &no_padding), [Err(64)]);
    // A truncated packet, and one that would cross into the next page.
    assert_eq!(shapes(64, &exit(0)[..63]), [Err(64)]);
    assert_eq!(shapes(4096 - 128, &sample(0)), [Err(4096 - 128), Err(4096)]);
}

proptest! {
    #[test]
    fn any_bytes_are_read_to_their_end(
        position in any::<u64>(),
        bytes in prop::collection::vec(prop_oneof![0u8..4, any::<u8>()], 0..9000),
    ) {
        let mut packets = Packets::new(position, &bytes);
        let mut read = 0u64;
        while let Some(packet) = packets.next() {
            let now = packets.position().wrapping_sub(position);
            prop_assert!(now > read && now <= bytes.len() as u64, "{packet:?} at {read}");
            read = now;
        }
        prop_assert_eq!(read, bytes.len() as u64);
    }
}

/// A sync of event 42 at time 5 and TSC 6.
fn sync(flags: u8, sequence: u64, lost: u64) -> Vec<u8> {
    let mut bytes = vec![3, flags];
    bytes.extend(1u16.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(*b"VPMUSYNC");
    for word in [42, 5, 6, sequence, lost, 7] {
        bytes.extend(u64::to_le_bytes(word));
    }
    assert_eq!(bytes.len(), 64);
    bytes
}
