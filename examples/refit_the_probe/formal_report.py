"""stub"""


def write(rows, folder, config, versions):
    rows.to_parquet(folder / "rows.parquet")
    return folder
