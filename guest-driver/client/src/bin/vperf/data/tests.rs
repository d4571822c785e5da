use super::*;
use std::fs;

fn lines(text: &str) -> Result<(Vec<Line>, bool), DataError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let mut lines = Vec::new();
    let cut = read(file.path(), |line| lines.push(line))?;
    Ok((lines, cut))
}

const HEADER: &str = "{\"header\":{\"version\":1,\"target\":\"'x'\"}}\n";
const CHAIN: &str = "{\"sample\":[0,4096,1,2,3,0,1000,true,[[],[4096,8192]]]}\n";
const SAMPLE: &str = "{\"sample\":[0,4096,1,2,3,0,1000,true]}\n";

#[test]
fn written_recording_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vperf.data");
    fs::write(&path, "before").unwrap();
    let mut writer = Writer::create(&path, "'x'").unwrap();
    let sample = Line::Sample(Sample(0, 4096, 1, 2, 3, 0, 1000, true, Chain::default()));
    let map = Map { start: 1, end: 2, offset: 3, path: "/bin/\u{e9}".into() };
    let process = Process { pid: 1, comm: "a\"b".into(), time: 0, maps: vec![map] };
    writer.line(&Line::Process(process.clone())).unwrap();
    writer.line(&sample).unwrap();
    writer.flush().unwrap();
    let mut lines = Vec::new();
    assert!(!read(&path, |line| lines.push(line)).unwrap());
    let header = Header { version: 3, target: "'x'".into() };
    assert_eq!(lines, [Line::Header(header), Line::Process(process), sample]);
    assert_eq!(fs::read_to_string(dir.path().join("vperf.data.old")).unwrap(), "before");
}

#[test]
fn truncated_recording_reads_up_to_the_cut() {
    let cut = format!("{HEADER}{SAMPLE}{}", &SAMPLE[..20]);
    let (lines, cut) = lines(&cut).unwrap();
    assert!(cut);
    assert_eq!(lines.len(), 2);
}

#[test]
fn chains_are_kept_and_files_without_any_are_read() {
    let (old, _) = lines(&format!("{HEADER}{SAMPLE}")).unwrap();
    assert!(matches!(&old[1], Line::Sample(sample) if sample.8.is_empty()));
    let header = HEADER.replace(":1,", ":2,");
    let (new, _) = lines(&format!("{header}{CHAIN}{SAMPLE}")).unwrap();
    let chain = Chain(vec![], vec![4096, 8192]);
    assert!(matches!(&new[1], Line::Sample(sample) if sample.8 == chain));
    assert_eq!(serde_json::to_string(&new[1]).unwrap() + "\n", CHAIN);
    assert_eq!(serde_json::to_string(&new[2]).unwrap() + "\n", SAMPLE);
}

#[test]
fn other_files_are_refused() {
    for text in ["", "\n", "hello\n", SAMPLE, "{}\n", "\u{7f}ELF", "PERFILE2\n"] {
        assert!(matches!(lines(text), Err(DataError::NotOurs)), "{text:?}");
    }
    for version in [0, 4] {
        let other = HEADER.replace(":1,", &format!(":{version},"));
        assert!(matches!(lines(&other), Err(DataError::Version(v)) if v == version));
    }
    let broken = format!("{HEADER}{SAMPLE}garbage\n{SAMPLE}");
    assert!(matches!(lines(&broken), Err(DataError::Line { line: 3, .. })));
}

#[test]
fn trace_with_any_bytes_reads_back() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut writer = Writer::create(file.path(), "'x'").unwrap();
    let aux = Aux { trace: 0, place: 1, position: 64, bytes: 6, data: b"\n\0{}\xff\n".to_vec() };
    let empty = Aux { bytes: 0, data: Vec::new(), ..aux.clone() };
    let traced = Line::Traced(Traced { trace: 0, place: 1, produced: 10, lost: 4, written: 6 });
    for line in [&Line::Aux(aux.clone()), &Line::Aux(empty.clone()), &traced] {
        writer.line(line).unwrap();
    }
    writer.flush().unwrap();
    let mut lines = Vec::new();
    assert!(!read(file.path(), |line| lines.push(line)).unwrap());
    assert_eq!(lines[1..], [Line::Aux(aux), Line::Aux(empty), traced]);
}

#[test]
fn truncated_bytes_are_omitted_and_wrong_lengths_reported() {
    let aux = |bytes: u64, data: &str| {
        format!("{{\"aux\":{{\"trace\":0,\"place\":0,\"position\":0,\"bytes\":{bytes}}}}}\n{data}")
    };
    for cut in [aux(4, "abc"), aux(4, "abcd"), aux(u64::MAX, "abcd\n"), aux(1, "")] {
        let (lines, is_cut) = lines(&format!("{HEADER}{SAMPLE}{cut}")).unwrap();
        assert!(is_cut, "{cut}");
        assert_eq!(lines.len(), 2);
    }
    let (whole, is_cut) = lines(&format!("{HEADER}{}{SAMPLE}", aux(4, "abcd\n"))).unwrap();
    assert_eq!((whole.len(), is_cut), (3, false));
    let wrong = lines(&format!("{HEADER}{}{SAMPLE}", aux(3, "abcd\n")));
    assert!(matches!(wrong, Err(DataError::Aux(2))), "{wrong:?}");
}
