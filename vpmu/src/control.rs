//! The control queue: open, close, map, unmap, catalogue, task pages. Every number here comes
//! from the guest and is checked before use.

use std::collections::BTreeSet;
use std::io::Read;

use vm_memory::{GuestAddress, GuestMemory, Permissions};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::abi::{
    CONTEXT_TASK, CONTROL_CATALOGUE, CONTROL_CLOSE, CONTROL_MAP, CONTROL_OPEN, CONTROL_TASK_PAGE,
    CONTROL_UNMAP, CatalogueEntry, CatalogueRequest, ControlHeader, ControlReply, ENGINE_ANY,
    ENGINE_BATCHED, ENGINE_EXIT, F_TASK_PAGE, KIND_RAW, MAP_WRITABLE, MapRequest, OPEN_ENABLED,
    OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER, OPEN_WATERMARK, OpenReply, OpenRequest, PAGE_SIZE,
    QUEUE_CONTROL, TaskPageRequest,
};
use crate::catalogue::{Catalogue, Entry};
use crate::errno::{Errno, status};
use crate::event::{Context, Event, Facts, Host};
use crate::period::Period;
use crate::queues::{BadChain, Chain, put};
use crate::ring::{Manner, Ring, Wakeup};
use crate::state::State;

/// The fields of a sample that are written.
const SAMPLE_WRITTEN: u64 = 0x1_03c7;
const OPEN_FLAGS: u32 = OPEN_ENABLED | OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL | OPEN_WATERMARK;

impl State {
    /// Serves the control queue; whether the driver wants an interrupt for it.
    pub(crate) fn serve_control(&mut self, host: &Host<'_>, catalogue: &Catalogue) -> bool {
        let index = usize::from(QUEUE_CONTROL);
        let mut served = false;
        for _ in 0..self.queues.bound(index) {
            let Some(chain) = self.queues.take(index) else {
                break;
            };
            self.metrics.control_requests += 1;
            let len = self
                .answer(host, catalogue, &chain)
                .unwrap_or_else(|BadChain| {
                    self.metrics.bad_requests += 1;
                    0
                });
            self.queues.give_back(index, &chain, len);
            served = true;
        }
        served && self.queues.wants_interrupt(index)
    }

    /// Carries out one request; bytes of the answer.
    fn answer(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        chain: &Chain,
    ) -> Result<u32, BadChain> {
        let request = self.copy_request(chain)?;
        let (room, mut writer) = chain.writer()?;
        let Ok((header, _)) = ControlHeader::read_from_prefix(&request) else {
            return simple(room, &mut writer, || Err(Errno::EINVAL));
        };
        if header.reserved.get() != 0 {
            return simple(room, &mut writer, || Err(Errno::EINVAL));
        }
        let event = header.event.get();
        match header.op.get() {
            CONTROL_OPEN => {
                enough(room, size_of::<OpenReply>())?;
                let opened = self.open(host, catalogue, &request);
                let (engine, id) = opened.unwrap_or_default();
                let reply = OpenReply {
                    status: status(&opened).into(),
                    engine: engine.into(),
                    id: id.into(),
                };
                put(&mut writer, &reply)?;
                Ok(wire_len::<OpenReply>(1))
            }
            CONTROL_CATALOGUE => {
                enough(room, size_of::<ControlReply>())?;
                let fit = (room - size_of::<ControlReply>()) / size_of::<CatalogueEntry>();
                let entries = part(catalogue, &request, fit);
                let some = entries.as_deref().unwrap_or(&[]);
                let count = u32::try_from(some.len()).unwrap_or(u32::MAX);
                let reply = ControlReply {
                    status: status(&entries).into(),
                    value: count.into(),
                };
                put(&mut writer, &reply)?;
                some.iter().try_for_each(|entry| put(&mut writer, entry))?;
                Ok(wire_len::<ControlReply>(1) + wire_len::<CatalogueEntry>(count))
            }
            CONTROL_CLOSE => simple(room, &mut writer, || self.close(host, event)),
            CONTROL_MAP => simple(room, &mut writer, || self.map(host, &request)),
            CONTROL_UNMAP => simple(room, &mut writer, || self.unmap(event)),
            CONTROL_TASK_PAGE => simple(room, &mut writer, || self.task_page(&request)),
            _ => simple(room, &mut writer, || Err(Errno::EOPNOTSUPP)),
        }
    }

    /// The request's bytes, of which no more are copied than the longest request has.
    fn copy_request(&self, chain: &Chain) -> Result<Vec<u8>, BadChain> {
        let pages = self.settings.limits.max_ring_pages as usize + 1;
        let longest = size_of::<MapRequest>() + pages * size_of::<U64>();
        let longest = longest.max(size_of::<OpenRequest>());
        let (len, reader) = chain.reader()?;
        let mut request = Vec::with_capacity(len.min(longest));
        reader
            .take(longest as u64)
            .read_to_end(&mut request)
            .map_err(|_| BadChain)?;
        Ok(request)
    }

    /// Opens an event: its engine and id.
    fn open(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        request: &[u8],
    ) -> Result<(u32, u64), Errno> {
        let (request, _) = OpenRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let flags = request.flags.get();
        if request.header.event.get() != 0
            || request.max_stack.get() != 0
            || request.leader.get() != 0
            || request.read_format.get() != 0
            || request.reserved.get() != 0
            || flags & !OPEN_FLAGS != 0
            || request.engine.get() > ENGINE_BATCHED
        {
            return Err(Errno::EINVAL);
        }
        let context = match request.context.get() {
            CONTEXT_TASK => Context::Task(None),
            vcpu if vcpu < self.settings.vcpus => Context::Vcpu(vcpu),
            _ => return Err(Errno::EINVAL),
        };
        let owner = match request.parent.get() {
            0 => None,
            parent => {
                let parent = self.events.get(&parent).ok_or(Errno::EINVAL)?;
                Some(parent.facts.owner)
            }
        };
        let entry = self.allowed(catalogue, &request)?;
        let shortest_period = entry.shortest_period.unwrap_or(1);
        let period = Some(request.period.get())
            .filter(|&period| period > 0)
            .map(Period::new);
        if self.events.len() >= self.settings.limits.max_events as usize {
            return Err(Errno::ENOSPC);
        }
        let id = self.next_id;
        let facts = Facts {
            id,
            owner: owner.unwrap_or(id),
            kind: request.kind.get(),
            config: request.config.get(),
            exclude_user: flags & OPEN_EXCLUDE_USER != 0,
            exclude_kernel: flags & OPEN_EXCLUDE_KERNEL != 0,
            sample_type: request.sample_type.get(),
            wakeup: wakeup(&request),
            shortest_period,
        };
        let mut event = Event::new(facts, context, period);
        event.prepare(host, Self::first_vcpu(host, context))?;
        event.enabled = flags & OPEN_ENABLED != 0;
        self.next_id += 1;
        self.events.insert(id, event);
        if let Err(error) = self.start(host, id) {
            self.events.remove(&id);
            self.output.forget(id);
            return Err(error);
        }
        self.metrics.events_opened += 1;
        Ok((period.map_or(ENGINE_ANY, |_| ENGINE_EXIT), id))
    }

    /// The entry that is asked for, if it can be had as asked.
    fn allowed<'a>(
        &self,
        catalogue: &'a Catalogue,
        request: &OpenRequest,
    ) -> Result<&'a Entry, Errno> {
        let kind = request.kind.get();
        if kind == KIND_RAW {
            // A raw code can reach host counters that see more than this guest.
            return Err(Errno::EOPNOTSUPP);
        }
        let entry = catalogue
            .find(kind, request.config.get())
            .ok_or(Errno::ENOENT)?;
        let excludes = request.flags.get() & (OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL) != 0;
        let period = request.period.get();
        let sampled = entry
            .shortest_period
            .is_some_and(|shortest| period >= shortest && self.has_rings());
        if request.engine.get() == ENGINE_BATCHED
            || request.sample_type.get() & !SAMPLE_WRITTEN != 0
            || excludes && !entry.excludes
            || period > 0 && !sampled
        {
            return Err(Errno::EOPNOTSUPP);
        }
        Ok(entry)
    }

    fn map(&mut self, host: &Host<'_>, request: &[u8]) -> Result<(), Errno> {
        if !self.has_rings() {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, rest) = MapRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let facts = self.events.get(&id).ok_or(Errno::ENOENT)?.facts;
        if request.flags.get() & !MAP_WRITABLE != 0 || facts.owner != id {
            return Err(Errno::EINVAL);
        }
        let pages = self.check_pages(request.pages.get(), rest)?;
        if self.output.has_ring(id) {
            return Err(Errno::EBUSY);
        }
        if self.output.pages() + pages.len() > self.settings.limits.max_pages as usize {
            return Err(Errno::ENOSPC);
        }
        let writable = request.flags.get() & MAP_WRITABLE != 0;
        let memory = self.output.memory();
        let manner = Manner {
            writable,
            backward: false,
        };
        let ring = Ring::new(memory, &pages, manner, self.clock).map_err(|_| Errno::EINVAL)?;
        self.output.add_ring(id, ring);
        self.update(host, id)
    }

    /// The addresses of `count` pages that can be a ring: aligned, in memory, each named once.
    fn check_pages(&self, count: u32, addresses: &[u8]) -> Result<Vec<GuestAddress>, Errno> {
        let data = count.checked_sub(1).ok_or(Errno::EINVAL)?;
        if data != 0 && !data.is_power_of_two() || data > self.settings.limits.max_ring_pages {
            return Err(Errno::EINVAL);
        }
        let (addresses, _) = <[U64]>::ref_from_prefix_with_elems(addresses, count as usize)
            .map_err(|_| Errno::EINVAL)?;
        let pages: Vec<GuestAddress> = addresses.iter().map(|a| GuestAddress(a.get())).collect();
        let distinct: BTreeSet<_> = pages.iter().collect();
        let usable = pages.iter().all(|&page| self.is_page(page));
        if distinct.len() == pages.len() && usable {
            Ok(pages)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// Whether a page of guest memory begins at `address`.
    fn is_page(&self, address: GuestAddress) -> bool {
        address.0.is_multiple_of(PAGE_SIZE as u64)
            && self
                .output
                .memory()
                .check_range(address, PAGE_SIZE, Permissions::ReadWrite)
    }

    fn unmap(&mut self, id: u64) -> Result<(), Errno> {
        if let Some(event) = self.events.get(&id) {
            self.output.flush(&event.facts);
        }
        if self.output.remove_ring(id) {
            return Ok(());
        }
        Err(if self.events.contains_key(&id) {
            Errno::EINVAL
        } else {
            Errno::ENOENT
        })
    }

    fn task_page(&mut self, request: &[u8]) -> Result<(), Errno> {
        if self.features & 1 << F_TASK_PAGE == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, _) = TaskPageRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let vcpu = request.vcpu.get();
        let page = Some(GuestAddress(request.address.get())).filter(|page| page.0 != 0);
        if request.header.event.get() != 0
            || request.reserved.get() != 0
            || vcpu >= self.settings.vcpus
            || page.is_some_and(|page| !self.is_page(page))
        {
            return Err(Errno::EINVAL);
        }
        self.output.set_task_page(vcpu, page);
        Ok(())
    }
}

fn wakeup(request: &OpenRequest) -> Wakeup {
    match request.wakeup.get() {
        0 => Wakeup::Page,
        bytes if request.flags.get() & OPEN_WATERMARK != 0 => Wakeup::Bytes(bytes),
        records => Wakeup::Records(records),
    }
}

/// The part of the catalogue that is asked for, `fit` entries at most.
fn part(catalogue: &Catalogue, request: &[u8], fit: usize) -> Result<Vec<CatalogueEntry>, Errno> {
    let (request, _) = CatalogueRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
    if request.header.event.get() != 0 {
        return Err(Errno::EINVAL);
    }
    let rest = catalogue
        .entries()
        .get(request.first.get() as usize..)
        .ok_or(Errno::EINVAL)?;
    let count = fit.min(request.count.get() as usize);
    Ok(rest.iter().take(count).map(|entry| entry.wire()).collect())
}

/// Answers with a [`ControlReply`], if there is room for it; nothing is done otherwise.
fn simple(
    room: usize,
    writer: &mut impl std::io::Write,
    act: impl FnOnce() -> Result<(), Errno>,
) -> Result<u32, BadChain> {
    enough(room, size_of::<ControlReply>())?;
    let reply = ControlReply {
        status: status(&act()).into(),
        value: 0.into(),
    };
    put(writer, &reply)?;
    Ok(wire_len::<ControlReply>(1))
}

fn enough(room: usize, needed: usize) -> Result<(), BadChain> {
    if room < needed { Err(BadChain) } else { Ok(()) }
}

/// Bytes of `count` structs of the wire.
fn wire_len<T>(count: u32) -> u32 {
    // Structs of the wire are small, and counts bounded by the room that the driver gave.
    u32::try_from(size_of::<T>()).map_or(u32::MAX, |size| size.saturating_mul(count))
}
