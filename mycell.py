def cell(config, folder):
    return [{**config, "value": 2}]
