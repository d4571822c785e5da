//! `vmm serve`: the device in a process of its own, for a virtual machine of a VMM that is not changed for it. The VMM
//! forwards each access to the device's registers as a message of vfio-user, and the vCPU waits for the answer.
//!
//! `connection` and `message` speak the protocol. `function` is the PCI function with virtio's registers, in the regions
//! that `config_space` lays out. `carried` is the device behind it, which counts on the `threads` of the VMM's vCPUs.

mod args;
mod carried;
mod config_space;
mod connection;
mod dma;
mod doorbell;
mod foreign;
mod function;
mod interrupts;
mod message;
mod service;
mod threads;
mod window;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use kvm_ioctls::Kvm;
use rustix::process::Pid;
use vpmu::host::HostFiles;
use vpmu_kvm::probe::{GuestIps, Sampling};

pub use self::args::ServeArgs;
pub use self::connection::ConnectionError;
pub use self::threads::ThreadsError;

use self::carried::Prepared;
use self::connection::Connection;
use self::function::Function;
use self::message::Request;
use self::window::Window;
use crate::arch::clock::GuestClock;
use crate::config::{Config, ConfigError};
use crate::confine::{ConfineError, Confinement, Inherited};
use crate::ctl::{self, ServerError, Socket, SocketError};
use crate::exit::{EXIT_FAILURE, EXIT_USAGE};
use crate::kvm::KvmError;
use crate::logger;
use crate::operator::{Operator, OperatorError};
use crate::signal::{EndingSignals, SignalError};
use crate::terminal;
use crate::vm;

/// Errors of `vmm serve`.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The options contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The size of the window is not a power of two, as a PCI region must be.
    #[error("a window of {0} bytes: --window must be a power of two of at least 4K")]
    WindowSize(u64),
    /// A limit on what the VMM does.
    #[error("{0} limits what the VMM does: set its limit there, and omit {0}")]
    Limit(&'static str),
    /// There is no PMU to carry.
    #[error("nothing to serve: omit '--pmu off'")]
    Off,
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The VMM could not connect.
    #[error("cannot accept the VMM's connection")]
    Accept(#[source] io::Error),
    /// The VMM's process is not visible.
    #[error("the VMM's process is not visible: run the daemon in the VMM's PID namespace, or in a parent of it")]
    Hidden,
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The vCPUs' threads are not known.
    #[error("cannot tell the VMM's vCPUs apart")]
    Threads(#[from] ThreadsError),
    /// The vCPU of a store cannot be found.
    #[error("cannot find out which vCPU makes a mark: run the daemon as the VMM's user or as root")]
    Doorbell(#[source] io::Error),
    /// The device could not be started before.
    #[error("the device could not be started")]
    NoDevice,
    /// The host has no more of these.
    #[error("the host has no more {0}")]
    Host(&'static str, #[source] io::Error),
    /// The host cannot map the window.
    #[error("cannot map the window: choose a smaller one with --window")]
    Window(#[source] io::Error),
    /// The TSC's frequency is not known.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM cannot create the VM that tells the TSC's frequency.
    #[error("KVM cannot tell the frequency of the TSC")]
    Clock(#[source] kvm_ioctls::Error),
    /// Signals cannot be set up.
    #[error(transparent)]
    Signal(#[from] SignalError),
    /// Privileges cannot be dropped.
    #[error(transparent)]
    Confine(#[from] ConfineError),
    /// The host's events cannot be used.
    #[error("cannot use the host's events")]
    Source(#[from] vpmu::host::Error),
    /// The device cannot be created, or started with the driver's setup.
    #[error(transparent)]
    Device(#[from] vpmu::Error),
    /// A persistent event cannot be started, or a recording cannot be written.
    #[error(transparent)]
    Operator(#[from] OperatorError),
    /// The control socket cannot be served.
    #[error(transparent)]
    Ctl(#[from] ServerError),
    /// The virtio library refuses the size of a queue, which is a bug.
    #[error("cannot create the virtqueues")]
    Queues(#[from] virtio_queue::Error),
}

impl ServeError {
    /// The exit status.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) => error.exit_code(),
            Self::WindowSize(_) | Self::Limit(_) | Self::Off => EXIT_USAGE,
            _ => EXIT_FAILURE,
        }
    }
}

/// The end of `vmm serve`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The VMM has ended the connection.
    Disconnected,
    /// A signal to this process.
    Signal(i32),
}

/// Serves one VMM until it ends the connection, or a signal arrives.
///
/// # Errors
/// [`ServeError`].
pub fn run(args: &ServeArgs) -> Result<Served, ServeError> {
    let inherited = Inherited::find();
    let config = Config::of_device(args.vcpus, &args.device)?;
    if !config.vpmu {
        return Err(ServeError::Off);
    }
    if !config.window.is_power_of_two() {
        return Err(ServeError::WindowSize(config.window));
    }
    let limits = &args.device.limits;
    let of_vmm = [("--max-resets", limits.max_resets.is_some()), ("--max-console", limits.max_console.is_some())];
    if let Some((flag, _)) = of_vmm.into_iter().find(|(_, given)| *given) {
        return Err(ServeError::Limit(flag));
    }
    logger::limit(config.limits.log_lines);
    Confinement::prepare(&config.confinement)?;
    let guest_ips = GuestIps::begin(None, Sampling::PATIENT);
    let guest_ips = guest_ips.map_err(|source| ServeError::Host("threads", source))?;
    let recorder = Operator::recorder(&config)?;
    let files = HostFiles::read(&config.hardware);
    let ctl = config.ctl.as_deref().map(|path| Socket::listen(path, config.confinement.user)).transpose()?;
    let mut settings = vm::settings(&config, tsc_khz()?).remote();
    Confinement::fit_descriptors(&mut settings, config.limits.host_counters_asked)?;
    let window = Window::new(config.window).map_err(ServeError::Window)?;
    let signals = EndingSignals::new()?;
    let guest_ips = guest_ips.answer();

    let socket = Socket::listen(&args.socket, None)?;
    log::info!("waiting for a VMM at {}", args.socket.display());
    let Some((stream, process)) = accept(&socket, &signals)? else {
        return Ok(Served::Signal(signals.read().unwrap_or(0)));
    };
    drop(socket);
    let other = stream.try_clone().map_err(ServeError::Accept)?;
    let prepared =
        Prepared { config, settings, files, recorder, socket: ctl, inherited, guest_ips, signals, stream: other };
    let mut function = Function::new(prepared, window, process)?;
    match function.attach() {
        // The VMM starts its vCPUs later.
        Err(ServeError::Threads(error)) => log::info!("{}", vpmu_errors::chain(&error)),
        attached => attached?,
    }
    let served = serve(&mut function, Connection::new(stream));
    let signal = function.end();
    served?;
    Ok(signal.map_or(Served::Disconnected, Served::Signal))
}

/// Answers the VMM's requests until it ends the connection.
fn serve(function: &mut Function, mut connection: Connection) -> Result<(), ServeError> {
    while let Some(message) = connection.receive()? {
        let request = Request::parse(&message.header, &message.body, message.files);
        let answer = request.and_then(|request| function.serve(request));
        match answer {
            Ok(answer) => {
                let file = answer.file.map(AsFd::as_fd);
                connection.answer(&message.header, Ok(&answer.body), file)?;
            }
            Err(refused) => {
                log::debug!("refused {:?}: {refused:?}", message.header);
                connection.answer(&message.header, Err(refused), None)?;
            }
        }
    }
    Ok(())
}

/// Waits for the VMM's connection. Returns it with the VMM's process, or `None` if a signal arrives first.
fn accept(socket: &Socket, signals: &EndingSignals) -> Result<Option<(UnixStream, Pid)>, ServeError> {
    loop {
        match terminal::wait_readable(socket.listener.as_raw_fd(), [signals.as_raw_fd(), -1]) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ServeError::Accept(error)),
        }
        let (stream, _) = socket.listener.accept().map_err(ServeError::Accept)?;
        if !ctl::is_ours(&stream).map_err(ServeError::Accept)? {
            log::warn!("refused a process of another user on the socket");
            continue;
        }
        let process = Pid::from_raw(ctl::peer(&stream).map_err(ServeError::Accept)?.pid);
        return Ok(Some((stream, process.ok_or(ServeError::Hidden)?)));
    }
}

/// The frequency of the TSC of a guest of this host's KVM, in kHz.
fn tsc_khz() -> Result<u32, ServeError> {
    let kvm = Kvm::new().map_err(ServeError::Clock)?;
    let vm = kvm.create_vm().map_err(ServeError::Clock)?;
    let vcpu = vm.create_vcpu(0).map_err(ServeError::Clock)?;
    Ok(GuestClock::new(&kvm, &vm, &[vcpu])?.khz())
}
