cd /work/h3; (set +e; source bin/setup >/dev/null; export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_btl_sm_backing_directory=$(mktemp -d)
rm -rf /work/h3out/try1; timeout 900 kaitian-train -n 4 --model mobilenetv2 --devices cpu --global-batch-size 64 --epochs 4 --run-dir /work/h3out/try1 --log-interval 10 )
