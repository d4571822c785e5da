//! A trace of the accesses that the machine's devices handle. It shows the guest how long its vCPU waited for the VMM.
//! Guests open the trace by its name.

use std::time::Duration;

use vpmu::abi::FORMAT_VMM;
use vpmu::{Access, AuxError, AuxProducer, Vpmu};

/// The trace's number among the VMM's producers.
const NUMBER: u64 = 0;
/// Words of a packet.
const WORDS: usize = 3;
/// In a packet's first word: the guest wrote.
const WRITE: u64 = 1 << 8;
/// In a packet's first word: the position of the number of accesses.
const COUNT_SHIFT: u32 = 32;

/// The trace in the catalogue.
pub(crate) const PRODUCER: AuxProducer = AuxProducer {
    name: "handlers",
    counts: "accesses that devices of the VMM handled: size, direction and number; address; nanoseconds",
    format: FORMAT_VMM.to_le_bytes()[0],
};

/// Writes the packet of an access to each trace that is active on `vcpu`. The vCPU waited for `time`. A packet that does
/// not fit counts as lost.
pub(super) fn record(vpmu: &Vpmu, vcpu: u32, access: &Access, time: Duration) {
    let packet = packet(access, time);
    for trace in vpmu.aux_traces(NUMBER, vcpu) {
        if let Err(error) = write(vpmu, trace, &packet) {
            // The guest may close the trace or take its area away at any time.
            log::debug!("no packet in trace {trace}: {error}");
        }
    }
}

fn packet(access: &Access, time: Duration) -> [u64; WORDS] {
    let direction = if access.write { WRITE } else { 0 };
    let what = u64::from(access.size) | direction | u64::from(access.count) << COUNT_SHIFT;
    [what, access.address, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)]
}

fn write(vpmu: &Vpmu, trace: u64, packet: &[u64]) -> Result<(), AuxError> {
    let mut writer = vpmu.aux_begin(trace)?;
    let size = match writer.put(packet) {
        Ok(()) => writer.written(),
        Err(AuxError::NoRoom) => {
            writer.lose(size_of_val(packet) as u64);
            0
        }
        Err(error) => return Err(error),
    };
    writer.end(size)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};
    use vpmu::abi::{COMMAND_ENABLE, KIND_VMM_TRACE, MAP_WRITABLE, PAGE_SIZE};
    use vpmu_testkit::{Fixture, map_aux, open_of};

    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn access(address: u64, write: bool) -> Access {
        Access { address, size: 4, write, count: 1 }
    }

    /// A device with a trace of vCPU 0, which is not enabled; returns its id and the address of its area of one page.
    fn traced() -> (Fixture, u64, u64) {
        let mut fixture = Fixture::producing(&[PRODUCER]);
        let trace = fixture.opened(&open_of(KIND_VMM_TRACE, NUMBER, 0));
        let [metadata, area] = [0, 4].map(|page| fixture.next_ring + page * PAGE);
        fixture.next_ring += 8 * PAGE;
        fixture.map_pages(trace, MAP_WRITABLE, &[metadata, metadata + PAGE]).expect("a ring");
        map_aux(&mut fixture, trace, MAP_WRITABLE, &[area]).expect("an area");
        (fixture, trace, area)
    }

    #[test]
    fn access_is_in_the_trace_of_its_vcpu() {
        let (mut fixture, trace, area) = traced();
        let words = |fixture: &Fixture| -> [u64; 2 * WORDS] {
            let word = |at: usize| fixture.memory.read_obj(GuestAddress(area + 8 * at as u64)).expect("memory");
            std::array::from_fn(word)
        };
        // The trace is not enabled yet.
        record(&fixture.vpmu, 0, &access(0x60, false), Duration::from_nanos(9));
        assert_eq!(words(&fixture), [0; 2 * WORDS]);
        fixture.command(0, COMMAND_ENABLE, trace);
        record(&fixture.vpmu, 0, &access(0x60, false), Duration::from_nanos(700));
        record(&fixture.vpmu, 1, &access(0x61, false), Duration::from_nanos(8));
        record(&fixture.vpmu, 0, &Access { count: 3, ..access(0xd000_0000, true) }, Duration::from_micros(5));
        assert_eq!(words(&fixture), [4 | 1 << 32, 0x60, 700, 4 | WRITE | 3 << 32, 0xd000_0000, 5000]);
    }

    #[test]
    fn packet_that_does_not_fit_is_counted_as_lost() {
        let (mut fixture, trace, _) = traced();
        fixture.command(0, COMMAND_ENABLE, trace);
        let size = 8 * WORDS as u64;
        let fit = PAGE / size;
        for _ in 0..fit + 2 {
            record(&fixture.vpmu, 0, &access(0x60, true), Duration::ZERO);
        }
        let reply = fixture.read(0, trace);
        assert_eq!((reply.value.get(), reply.lost.get()), ((fit + 2) * size, 2 * size));
    }
}
