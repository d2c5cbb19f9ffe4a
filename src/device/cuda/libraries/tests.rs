use super::*;

#[test]
fn a_missing_library_is_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let error = search(Library::Cudnn, &[folder.path().to_path_buf()], &[], None).unwrap_err();
    assert!(error.contains("libcudnn.so.9"), "{error}");
    assert!(error.contains(&folder.path().display().to_string()), "{error}");
}

#[test]
fn the_drivers_own_nvrtc_goes_first_and_what_the_user_named_before_it() {
    let [old, new, both] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let at = |folder: &tempfile::TempDir, major: u32| folder.path().join(format!("libnvrtc.so.{major}"));
    for file in [at(&old, 12), at(&new, 13), at(&both, 12), at(&both, 13)] {
        std::fs::write(file, "").unwrap();
    }
    let folders = [&new, &old, &both].map(|f| f.path().to_path_buf());
    let order = |asked: &[PathBuf], driver| candidates(Library::Nvrtc, &folders, asked, driver);
    let loaders = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(PathBuf::from);
    // Without a driver: the loader's, newest first, then by folder.
    let plain = order(&[], None);
    assert_eq!(plain[..3], loaders);
    assert_eq!(plain[3..], [at(&new, 13), at(&old, 12), at(&both, 13), at(&both, 12)]);
    let twelve = order(&[], Some(12));
    assert_eq!(twelve[..3], [loaders[1].clone(), at(&old, 12), at(&both, 12)]);
    assert_eq!(twelve[3], loaders[0]);
    assert_eq!(order(&[], Some(13))[..2], [loaders[0].clone(), at(&new, 13)]);
    // A driver of the future changes nothing.
    assert_eq!(order(&[], Some(14)), plain);
    // The folder that was named wins with what it has.
    assert_eq!(order(&folders[..1], Some(12))[..2], [at(&new, 13), loaders[1].clone()]);
    assert_eq!(order(&folders[2..], Some(12))[..2], [at(&both, 12), at(&both, 13)]);
}

#[test]
fn a_broken_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcudnn.so.9"), "not a library").unwrap();
    let error = search(Library::Cudnn, &[folder.path().to_path_buf()], &[], None).unwrap_err();
    assert!(error.contains("not usable"), "{error}");
}

/// What the bindings will open is what is found, looked at and told.
#[test]
fn the_plain_name_goes_first_where_the_bindings_ask_for_it() {
    let first = |library| candidates(library, &[], &[], None)[0].clone();
    assert_eq!(first(Library::Cudnn), PathBuf::from("libcudnn.so"));
    assert_eq!(first(Library::CublasLt), PathBuf::from("libcublasLt.so"));
    assert_eq!(first(Library::Nvrtc), PathBuf::from("libnvrtc.so.13"));
    assert_eq!(first(Library::Nccl), PathBuf::from("libnccl.so.2"));
}

/// A library that is broken where the user said to look is not passed over for another one.
#[test]
fn a_broken_library_in_the_named_folder_ends_the_search() {
    let [named, other] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    std::fs::write(named.path().join("libcudnn.so.9"), "not a library").unwrap();
    let folders = [&named, &other].map(|f| f.path().to_path_buf());
    let error = search(Library::Cudnn, &folders, &folders[..1], None).unwrap_err();
    assert!(error.contains("cannot be used") && error.contains("libcudnn.so.9"), "{error}");
}

#[test]
fn python_environments_are_searched() {
    let prefix = tempfile::tempdir().unwrap();
    let lib = prefix.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
    std::fs::create_dir_all(&lib).unwrap();
    let sites = site_packages(prefix.path());
    let found: Vec<PathBuf> = sites.iter().flat_map(|s| glob_dirs(&s.join("nvidia"), "lib")).collect();
    assert_eq!(found, [lib]);
}

#[test]
fn an_address_leads_to_its_file() {
    let here = mapped_file(an_address_leads_to_its_file as *const () as usize).unwrap();
    assert_eq!(here, env::current_exe().unwrap());
}
