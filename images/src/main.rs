//! The `images` program.

mod cli;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use cli::{Action, ArchKernelArgs, BootArgs, Cli};
use images::cache::{Cache, CacheError};
use images::kernel::Kernel;
use images::programs::Programs;
use images::size::Size;
use images::{Arch, Boot, Outcome, dkms, initramfs, module, style};
use vpmu_errors::chain;

fn main() -> ExitCode {
    match run(Cli::parse_from(cli::arguments(std::env::args_os()))) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("images: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, Box<dyn Error>> {
    let cache = Cache::select(cli.cache.as_deref(), cli.cache_size)?;
    match cli.action {
        Action::Kernel(which) => {
            let kernel = kernel(cache, which)?;
            println!("kernel {}", kernel.image.display());
            println!("bzimage {}", kernel.bzimage.display());
            println!("headers {}", kernel.headers.display());
            if let Some(symbols) = kernel.symbols(cache)? {
                println!("symbols {}", symbols.display());
            }
            if let Some(tables) = kernel.orc(cache)? {
                println!("orc {}", tables.display());
            }
            if let Some(modules) = kernel.modules {
                println!("modules {}", modules.display());
            }
        }
        Action::Module(which) => println!("{}", driver(cache, &kernel(cache, which)?)?.display()),
        Action::Dkms(which) => {
            let kernel = Kernel::get(cache, &which.sources(Arch::default()))?;
            let directory = tempfile::tempdir()?;
            let module = dkms::install(&kernel, directory.path())?;
            let bytes = module.metadata()?.len();
            println!("{} of {bytes} bytes for {}", module::NAME, kernel.id);
        }
        Action::Style => {
            let complaints = style::check(cache, &module::driver())?;
            for complaint in &complaints {
                println!("{complaint}");
            }
            if !complaints.is_empty() {
                return Ok(ExitCode::FAILURE);
            }
        }
        Action::Programs { arch, programs } => {
            for (name, file) in Programs::build(cache, arch.arch, &programs)?.all() {
                println!("{name} {}", file.display());
            }
        }
        Action::Initramfs { kernel: which, programs: tests } => {
            let kernel = kernel(cache, which)?;
            let driver = driver(cache, &kernel)?;
            let programs = Programs::build(cache, kernel.arch, &tests)?;
            let file = initramfs::guest(cache, &kernel, &driver, &programs, &tests)?;
            println!("{}", file.display());
        }
        Action::Boot(arguments) => return boot(&arguments, Boot::run),
        Action::Lab(arguments) => return boot(&arguments, Boot::run_on_lab_host),
        Action::Demo(args) => images::demo::run(args.choice(), args.arch())?,
        Action::Clean => clean(cache)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn kernel(cache: &Cache, which: ArchKernelArgs) -> Result<Kernel, Box<dyn Error>> {
    Ok(Kernel::get(cache, &which.sources())?)
}

fn driver(cache: &Cache, kernel: &Kernel) -> Result<PathBuf, Box<dyn Error>> {
    Ok(module::build(cache, kernel)?)
}

/// Empties the cache and prints what was removed.
fn clean(cache: &Cache) -> Result<(), CacheError> {
    let cleared = cache.clear()?;
    let directory = cache.directory().display();
    let (mut all, mut bytes) = (0, 0);
    for (kind, count, size) in cleared.removed {
        println!("{kind:<20} {count:>4} {size:>8}");
        all += count;
        bytes += size.0;
    }
    println!("removed {all} results ({}) from {directory}", Size(bytes));
    if cleared.in_use > 0 {
        println!("{} results stay, because other processes use them", cleared.in_use);
    }
    Ok(())
}

fn boot(
    arguments: &BootArgs,
    run: impl Fn(&Boot) -> Result<Outcome, images::Error>,
) -> Result<ExitCode, Box<dyn Error>> {
    let outcome = run(&arguments.boot()?)?;
    eprintln!("ran on {}: exit code {}, {:.1} s", outcome.kvm_host, outcome.status, outcome.wall.as_secs_f64());
    if let Some(file) = &arguments.report {
        let report = serde_json::to_vec_pretty(&outcome.report)?;
        std::fs::write(file, report).map_err(|e| format!("cannot write {}: {e}", file.display()))?;
    }
    Ok(ExitCode::from(u8::try_from(outcome.status).unwrap_or(u8::MAX)))
}
